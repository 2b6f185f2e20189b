"""What was done in a session, kept so that nothing is ever done twice.

`records` is the format on the disk, `file` one epoch's journal, `flush` its form in the blob store, `history` the
earlier epochs of a session.
"""
