"""Local processes: started, supervised, and ended with their parent."""
