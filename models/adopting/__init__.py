"""New weights in a running engine, from the arrays of a trainer.

- `mapping`: names of a trainer's arrays to names of a checkpoint's tensors; `tunix`, `easydel` and
  `maxtext` are tables of it.
- `reading`: how a tensor is read from an array with other axes.
- `staged`: the arrays of an update that is not complete yet.
- `plan`: which tensors make which parameters, checked.
- `program`: the program that makes the new arrays of a parameter in place of the old ones.
- `adopter`: checks an update as a whole, and then carries it out.
"""
