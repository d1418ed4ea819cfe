"""What several test folders share: real processes, and a small real model that loads through the pack."""
