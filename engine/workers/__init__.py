"""What each role does on its ranks. Which processes they live in is the controller's matter."""
