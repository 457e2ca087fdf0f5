"""What each role does on its ranks; the controller decides in which processes.

Read `role` first, what all have in common, then `actor`, where the loop over micro-batches is.
"""
