"""Several hosts on one machine: namespaces, joined by a network whose links can be slow, lossy or cut."""
