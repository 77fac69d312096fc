"""Parts of the commands: arguments, prompts from files, reports, and how errors end a command."""
