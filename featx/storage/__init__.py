"""Files and objects that appear whole or not at all: a disk, or a bucket that speaks S3.

In: a path or an s3:// URL, and bytes. Out: committed files; errors are `OSError`s with an errno.
Names for others: `local_folder.AtomicFolder` (every write to a store), `s3_folder.open_folder`
(an `AtomicFolder` or `S3Folder` for a path), `s3_path.parse_path`, `s3_path.S3Path`,
`s3_file.S3File`, `local_file.RawFile`.
"""
