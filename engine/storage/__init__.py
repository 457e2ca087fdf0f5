"""Local disks and object stores (`s3://…`): atomic, checksummed, in parallel; artifacts on top.

- Read `filesystem` first, the one way to a file system: endpoint, timeouts, retries, errors as
  sentences. `digests` has those of files and code; `s3` moves objects and whole folders.
- `artifacts` publishes folders with manifests, and downloads them; `folder` is a folder of
  checkpoint files, on a disk or in S3; `weight_files` reads and writes safetensors.
- `readers` reads tables, `json_rows` their JSON.
"""
