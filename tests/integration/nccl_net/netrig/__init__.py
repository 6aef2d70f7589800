"""A fake NCCL that loads a network plugin and drives it by NCCL's rules, strictly. Nothing here comes from the plugin's
own headers: the layouts are written down a second time."""
