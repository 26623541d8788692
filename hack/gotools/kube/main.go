// One binary holding the Kubernetes components a local cluster needs; the first argument picks one.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/restclient"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	cmds := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": kcm.NewControllerManagerCommand,
		"kube-proxy":              proxy.NewProxyCommand,
		"kubectl":                 kubectl.NewDefaultKubectlCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	}
	// Called by a component's name (a link to this binary) it is that component; else the first argument says which.
	args := os.Args
	if cmds[filepath.Base(args[0])] == nil {
		args = args[1:]
	}
	if len(args) == 0 || cmds[filepath.Base(args[0])] == nil {
		fmt.Fprintln(os.Stderr, "usage: kube COMPONENT [flags]")
		os.Exit(2)
	}
	c := cmds[filepath.Base(args[0])]()
	os.Args = args
	os.Exit(cli.Run(c))
}
