"""Many runs of one recipe: a grid, or a search for its best settings.

In:       a recipe, and settings to try.
Out:      run directories, tables, a better recipe.
Promise:  every run is an ordinary one that `fedlm train` would repeat.
Not here: one run (`training`), printing (`cli`).
"""
