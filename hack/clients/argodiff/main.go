// argodiff syncs one object as Argo CD does, and says what Argo CD's engine makes of it afterwards.
//
// It prints one JSON object: for each way in which Argo CD compares, whether it would call the object out of sync, and
// the live object beside the one that it predicts, both where they differ.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"

	"github.com/argoproj/gitops-engine/pkg/diff"
	"github.com/argoproj/gitops-engine/pkg/utils/kube"
	"github.com/argoproj/gitops-engine/pkg/utils/tracing"
	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"sigs.k8s.io/yaml"
)

// The field manager of Argo CD's application controller.
const manager = "argocd-controller"

type verdict struct {
	OutOfSync bool            `json:"outOfSync"`
	Live      json.RawMessage `json:"live,omitempty"`
	Predicted json.RawMessage `json:"predicted,omitempty"`
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "the cluster")
	resource := flag.String("resource", "", "plural name of the file's kind")
	sync := flag.String("sync", "", "apply the file first: client or server (the sync option ServerSideApply)")
	flag.Parse()
	found, err := run(context.Background(), *kubeconfig, *resource, *sync, flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(found)
}

func run(ctx context.Context, kubeconfig, plural, sync, path string) (map[string]verdict, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	desired := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(text, &desired.Object); err != nil {
		return nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	log, tracer := logr.Discard(), tracing.NopTracer{}
	kubectl := &kube.KubectlCmd{Log: log, Tracer: tracer}
	schema, parser, err := kubectl.LoadOpenAPISchema(config)
	if err != nil {
		return nil, err
	}
	if sync != "" {
		operations, cleanup, err := kubectl.ManageResources(config, schema)
		if err != nil {
			return nil, err
		}
		defer cleanup()
		if _, err := operations.ApplyResource(
			ctx, desired, cmdutil.DryRunNone, false, false, sync == "server", manager); err != nil {
			return nil, fmt.Errorf("sync: %w", err)
		}
	}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	kind := desired.GroupVersionKind().GroupVersion().WithResource(plural)
	live, err := client.Resource(kind).Namespace(desired.GetNamespace()).Get(ctx, desired.GetName(), metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	dryRuns, cleanup, err := kube.ManageServerSideDiffDryRuns(config, schema, tracer, log, nil)
	if err != nil {
		return nil, err
	}
	defer cleanup()
	runner := diff.WithServerSideDryRunner(diff.NewK8sServerSideDryRunner(dryRuns))
	common := []diff.Option{diff.WithLogr(log), diff.WithManager(manager), diff.WithGVKParser(parser)}
	ways := map[string][]diff.Option{
		"client":              nil,
		"structured":          {diff.WithStructuredMergeDiff(true)},
		"server":              {diff.WithServerSideDiff(true), runner},
		"server-and-webhooks": {diff.WithServerSideDiff(true), runner, diff.WithIgnoreMutationWebhook(false)},
	}
	found := map[string]verdict{}
	for name, options := range ways {
		result, err := diff.Diff(desired.DeepCopy(), live.DeepCopy(), append(options, common...)...)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		said := verdict{OutOfSync: result.Modified}
		if result.Modified {
			said.Live, said.Predicted = result.NormalizedLive, result.PredictedLive
		}
		found[name] = said
	}
	return found, nil
}
