"""Nothing is lost by a crash; reports are functions of the journal."""
