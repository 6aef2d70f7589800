"""Programs on other hosts: started through ssh or srun, and ended with the connection."""
