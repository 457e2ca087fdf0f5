"""Settings by which s3fs finds a server of the tests' own."""

from __future__ import annotations

import os


class environment:
    """S3's settings for a while; s3fs keeps file systems, so they are forgotten on both ends."""

    def __init__(self, **settings: str) -> None:
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        self.settings = {"AWS_DEFAULT_REGION": "us-east-1"} | keys | settings

    def __enter__(self) -> None:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        self.before = {key: os.environ.get(key) for key in self.settings}
        os.environ.update(self.settings)

    def __exit__(self, *error: object) -> None:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        for key, value in self.before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
