"""Starts ranks on this host: as processes of their own, in network namespaces if links are to be shaped."""
