"""Language models: shapes, loss and parameter counts match the stated definition."""
