"""What `scripts/generate_wire.py` made from the `.proto` files; nothing here is written by hand."""
