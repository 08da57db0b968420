"""What every framework's adapter stands on: changes that can be undone, forwards that survive copies, slots, one report.

| module | what it knows |
| --- | --- |
| `transaction` | every change to a foreign object, with its undo |
| `ranks` | ranks that attach together: one fails, all take back |
| `forwards` | a served module's class, and how copies lose it |
| `slots` | a module's parameter, for the engine, by weak references |
| `attachment` | engine, transaction and report of one model; what opens, serves and ends it |
| `root` | the engine's steps, tied to the forward of the root |
| `rules` | which modules can be served, and `exclude` |
| `report` | what was done with every parameter, and the bytes that it costs |
| `fingerprint`, `announce` | ranks are compared; the report is seen |

[Note: Who holds whom]
The model holds its `Attachment` (in its instance dictionary), that holds the engine. The engine, its units, slots and
policies hold weak references to everything of the framework. So a model that is dropped is freed by Python alone, and the
finalizer of the attachment then closes the engine: shared memory, sockets and threads go with the model, without `remove()`.
"""
