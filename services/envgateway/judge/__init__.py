"""Judging programs: cases in, one verdict per case out; expected values never reach the program's process."""
