"""The commands, those of one kind in a file. They parse, call the library, and show; nothing else."""
