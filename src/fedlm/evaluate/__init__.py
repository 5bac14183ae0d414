"""Numbers that agree with their definition on a case done by hand."""
