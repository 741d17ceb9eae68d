"""Grading of math answers with Math-Verify, in processes that can be killed."""
