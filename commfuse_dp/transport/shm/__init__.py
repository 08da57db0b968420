"""Between processes of one host: shared memory, and UNIX-domain sockets for the notices."""
