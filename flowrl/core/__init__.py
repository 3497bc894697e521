"""Values, protocols and errors that all packages share."""
