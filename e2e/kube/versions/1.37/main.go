// The programs of a Kubernetes control plane and node of this version in one binary, chosen by the name it is called by.
//
// kubectl is not among them: tests use one kubectl for every version of Kubernetes.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata" // CronJobs name time zones that the machine may not have

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func server(newCommand func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(newCommand())) }
}

var programs = map[string]func(){
	"etcd":                    func() { etcdmain.Main(os.Args) },
	"kube-apiserver":          server(apiserver.NewAPIServerCommand),
	"kube-controller-manager": server(controllermanager.NewControllerManagerCommand),
	"kube-proxy":              server(kubeproxy.NewProxyCommand),
	"kube-scheduler":          server(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":                 server(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
}

func main() {
	name := filepath.Base(os.Args[0])
	run, isKnown := programs[name]
	if !isKnown {
		fmt.Fprintf(os.Stderr, "%s: unknown program; call this binary by a link named after one\n", name)
		os.Exit(2)
	}
	run()
}
