package clusterapi

import (
	"encoding/json"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestShares(t *testing.T) {
	var annotations map[string]string
	if err := json.Unmarshal([]byte(os.Getenv("GIVEN")), &annotations); err != nil {
		t.Fatal(err)
	}
	annotations[nodeGroupMinSizeAnnotationKey] = "0"
	annotations[nodeGroupMaxSizeAnnotationKey] = "10"
	config := NewTestConfigBuilder().ForMachineDeployment().WithAnnotations(annotations).Build()
	config.nodes = []*corev1.Node{}
	controller := NewTestMachineController(t)
	defer controller.Stop()
	if err := controller.AddTestConfigs(config); err != nil {
		t.Fatal(err)
	}
	groups, err := controller.nodeGroups()
	if err != nil || len(groups) != 1 {
		t.Fatal(len(groups), err)
	}
	info, err := groups[0].TemplateNodeInfo()
	if err != nil {
		t.Fatal(err)
	}
	found, _ := json.Marshal(info.Node())
	if err := os.WriteFile(os.Getenv("NODE"), found, 0o644); err != nil {
		t.Fatal(err)
	}
}
