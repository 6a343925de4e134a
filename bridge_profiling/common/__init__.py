"""What every part uses: errors, text, files, processes, and what a launcher says of this process. Standard library only."""
