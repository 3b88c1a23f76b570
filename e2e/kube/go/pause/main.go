// Holds a pod's namespaces open and reaps the processes that are left to it, as process 1 of a pod must.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if pid <= 0 || err != nil {
			return
		}
	}
}

func main() {
	arrived := make(chan os.Signal, 16)
	signal.Notify(arrived, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for received := range arrived {
		if received != syscall.SIGCHLD {
			return
		}
		reap()
	}
}
