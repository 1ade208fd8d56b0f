"""Files that must outlive a machine: folders of checkpoints and snapshots, and payloads that are too large for a row.

They lie in the data folder, or in a bucket that every server of a cluster reaches. Keys are the same in both, relative
to the data folder or to the bucket's prefix: `checkpoints/…`, `journal/…`. Why it is built this way:
docs/decisions/blobs.md.

Others import:
    data_folder       DataFolder: folders in the data folder; HeldFolder: one that is in use
    bucket            Bucket: objects by key, with deadlines, retries and checksums
    bucket_folders    BucketFolders: folders in a bucket, and their cache on this machine
"""
