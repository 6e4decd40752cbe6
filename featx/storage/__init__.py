"""Files and objects: atomic commits on a disk, conditional PUT on S3, reads by ranges."""
