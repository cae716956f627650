"""The wire format: the layout of a bucket's fields, their codings, and the checksum."""
