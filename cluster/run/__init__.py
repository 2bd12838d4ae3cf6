"""One run: its configuration, command line, directory, journal, metrics, console, diagnosis and report."""
