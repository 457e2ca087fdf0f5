"""What each role does on its ranks; the controller decides in which processes."""
