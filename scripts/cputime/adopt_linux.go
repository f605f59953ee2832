package main

import (
	"os"
	"strconv"
	"strings"
	"syscall"
)

// prSetChildSubreaper is PR_SET_CHILD_SUBREAPER of prctl(2), which package syscall lacks.
const prSetChildSubreaper = 36

// adopt makes this process the parent of processes whose own parent ends, so that their CPU time counts.
func adopt() error {
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0); errno != 0 {
		return os.NewSyscallError("prctl", errno)
	}
	return nil
}

// countChildren returns how many children this process has.
func countChildren() int {
	pid := strconv.Itoa(os.Getpid())
	text, err := os.ReadFile("/proc/" + pid + "/task/" + pid + "/children")
	if err != nil {
		return 1 // at least one has not been waited for
	}
	return max(len(strings.Fields(string(text))), 1)
}
