"""In which order an engine runs the prompts that it has (FlowPrefill, and what it is compared with)."""
