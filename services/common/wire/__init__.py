"""Conversions between records and protobuf messages, in pairs."""
