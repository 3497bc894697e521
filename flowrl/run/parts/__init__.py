"""Parts by name, from files and from packages; settings; prompts; trust in files from elsewhere."""
