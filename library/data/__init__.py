"""Images, captions, buckets, caches and batches."""
