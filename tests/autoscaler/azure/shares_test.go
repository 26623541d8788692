package azure

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v6"
)

func TestShares(t *testing.T) {
	var tags map[string]*string
	if err := json.Unmarshal([]byte(os.Getenv("GIVEN")), &tags); err != nil {
		t.Fatal(err)
	}
	kind, location := "Standard_ND96isr_H100_v5", "eastus"
	set := &armcompute.VirtualMachineScaleSet{SKU: &armcompute.SKU{Name: &kind}, Location: &location, Tags: tags}
	template, err := buildNodeTemplateFromVMSS(set, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	node, err := buildNodeFromTemplate("gpus", template, &AzureManager{}, false, false)
	if err != nil {
		t.Fatal(err)
	}
	found, _ := json.Marshal(node)
	if err := os.WriteFile(os.Getenv("NODE"), found, 0o644); err != nil {
		t.Fatal(err)
	}
}
