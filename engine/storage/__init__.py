"""Folders in an object store (`s3://…`): whole, checked, in parallel.

`s3` says where S3 is and makes single requests, each with a deadline and tried again; `transfer`
moves the files of a folder in parallel. Nothing here knows what an artifact is
(`engine.storage.artifact_store`) or a checkpoint (`engine.checkpoint`).
"""
