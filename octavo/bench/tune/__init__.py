"""`octavo tune`: finds options of a server that suit a workload on this machine, by measuring.

`space` says what may be changed, `search` decides what is next, `objective` measures it, `report` tells.
"""
