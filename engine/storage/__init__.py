"""Local disks and object stores (`s3://…`): atomic, checksummed, in parallel; artifacts on top.

- `filesystem` is the one way to a file system: endpoint, timeouts, retries, errors as sentences;
  `atomic` the one way to write a local file; `hashing` the digests of files and folders.
- `objects` makes single requests to S3, `multipart` uploads an object in parallel parts, `transfer`
  moves the files of a folder. `folder` is a folder of checkpoint files, on a disk or in S3.
- `manifest` says what an artifact holds and was made from, `code_version` by which code,
  `locations` where artifacts are kept. `artifacts` publishes and downloads them, `artifact_store`
  does so in the store that machines share.
- `readers` reads tables, `hub` the names of models on the Hugging Face hub.
"""
