package main

// Numbers that the frozen syscall package lacks.
const (
	sysMemfdCreate  = 319
	sysMountSetattr = 442
	sysPidfdOpen    = 434
)
