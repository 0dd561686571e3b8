"""The store: what it is (manifest), what of it is done (ledger), its rows (shards, chunks).

In come arrays of whole shards, from any number of processes; out come checked rows. A shard counts
once the ledger names its files with size and hash, and what is read was checked against that.
The files are a Zarr v3 group that any Zarr reader opens: :mod:`shards.store.layout`, the bytes of a
shard: :mod:`shards.store.layout`.
"""
