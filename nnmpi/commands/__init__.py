"""The commands beside training: `nnmpi COMMAND`; one file each."""
