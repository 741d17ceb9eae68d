"""Code that runs programs and tests inside a confined child."""
