//go:build !unix

package redisstore

import "os/exec"

// killChildrenToo does nothing: the end of the command's context kills the command alone.
func killChildrenToo(*exec.Cmd) {}
