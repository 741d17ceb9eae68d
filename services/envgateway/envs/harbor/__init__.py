"""Task directories in the form of Harbor, played by commands of a shell in the sandbox."""
