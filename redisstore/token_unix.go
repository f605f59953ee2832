//go:build unix

package redisstore

import (
	"os/exec"
	"syscall"
)

// killChildrenToo makes the end of the command's context kill its children as well.
func killChildrenToo(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
