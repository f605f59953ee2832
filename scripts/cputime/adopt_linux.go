package main

import (
	"os"
	"path/filepath"
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

// children returns the commands of this process's children.
func children() (commands []string) {
	pid := strconv.Itoa(os.Getpid())
	tasks, _ := filepath.Glob("/proc/" + pid + "/task/*/children")
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		for _, child := range strings.Fields(string(text)) {
			command, _ := os.ReadFile("/proc/" + child + "/cmdline")
			commands = append(commands, child+" "+strings.TrimSpace(strings.ReplaceAll(string(command), "\x00", " ")))
		}
	}
	if len(commands) == 0 {
		return []string{"unknown"} // at least one has not been waited for
	}
	return commands
}
