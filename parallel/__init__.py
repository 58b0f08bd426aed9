"""The mechanisms of parallel training.

The files here say what is wanted: a mesh, a strategy, where arrays go, what is rematerialised or
offloaded, how a step is executed. The folders do it: `engine` (the data plane), `pipeline`,
`layerwise`, on top of `schedules` and `autodiff`.
"""
