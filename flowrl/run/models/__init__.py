"""Models from folders: loading, stored embeddings, and memory."""
