"""What people read: the answer on the terminal."""
